"""Pictures in and pictures out."""
