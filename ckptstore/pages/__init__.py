"""The web page of a store: documents, assets and the report; see :mod:`ckptstore.pages.site`."""
