"""Named layers: the catalog, checkpoint families, the store on disk."""
