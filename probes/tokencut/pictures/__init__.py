"""Pictures of what discovery found."""
