"""What decides a run: the recipe, how it is carried out and their validation. No torch here."""
