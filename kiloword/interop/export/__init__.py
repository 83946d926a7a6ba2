"""`kiloword export`: a model as other libraries load it, compared with the source before it is called done."""
