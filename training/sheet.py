"""Contact sheets."""

from PIL import Image


def grid(images, columns, scale):
    """uint8[n, h, w, 3] -> a PIL picture, row by row, each pixel `scale` times as large."""
    height, width = images.shape[1:3]
    picture = Image.new("RGB", (columns * width, -(-len(images) // columns) * height))
    for i, image in enumerate(images):
        picture.paste(Image.fromarray(image), (i % columns * width, i // columns * height))
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.LANCZOS)
