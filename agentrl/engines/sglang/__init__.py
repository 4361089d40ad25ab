"""The SGLang engine: servers in processes of their own."""
