"""Pictures of a report: which there are, and how pages show them."""
