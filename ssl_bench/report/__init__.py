"""A folder of pages that shows records: opens from disk, without a network or a server."""
