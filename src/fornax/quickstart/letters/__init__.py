"""One command from this machine's fonts to a flow model that draws letters, judged and served."""
