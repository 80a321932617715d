"""HTML pages about the records and pictures of a results folder. They open from disk."""
