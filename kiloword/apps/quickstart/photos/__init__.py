"""`kiloword quickstart photos`: five methods on captioned photos, on frozen pretrained towers, side by side."""
