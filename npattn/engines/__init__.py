"""How attention is computed: by one page, by loops, in tiles, and in extended precision."""
