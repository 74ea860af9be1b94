"""Files a run leaves: names, pictures, clips, and the settings inside them."""
