"""Compare the claims of papers with runs on two CPU cores, and generate the pages about them."""
