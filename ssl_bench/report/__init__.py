"""Create an HTML report of a results folder. A browser can open it without a web server."""
