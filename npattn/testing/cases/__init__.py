"""Problems that the judge asks: recipes, distributions, and how they are sampled."""
