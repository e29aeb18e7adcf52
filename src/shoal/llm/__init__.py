"""Language models put together: pipelines from their files, and generators from backends."""
