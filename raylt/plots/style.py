"""What the pictures have in common."""

# told apart by everyone, also in grey: Petroff's ten, a little changed
COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#2e8b57", "#832db6", "#a96b59", "#f781bf", "#b9ac3a", "#1a1a40", "#5fd3d8")
