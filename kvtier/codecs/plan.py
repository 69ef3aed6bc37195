"""Which precision plan a name means, and which codec carries it out."""
