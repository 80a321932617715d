"""Create an HTML report of a results folder, which browsers open without a web server."""
