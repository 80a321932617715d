"""Compare the papers' claims with runs on two CPU cores; generate the pages about them."""
