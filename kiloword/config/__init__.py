"""What decides a run: the recipe, how it is carried out, defaults by device, and their validation. No torch here."""
