"""Named layers: the catalog, checkpoint families, the importer and the store on disk."""
