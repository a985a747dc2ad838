"""Text on the color map has enough contrast."""

from tgen.cli.render.colormap import color_at, is_light


def test_black_or_white_text_has_contrast_on_every_color():
    def luminance(color):
        parts = [c / 255 for c in color]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for i in range(101):
        background = luminance(color_at(i / 100))
        white_contrast, black_contrast = 1.05 / (background + 0.05), (background + 0.05) / 0.05
        assert (black_contrast if is_light(color_at(i / 100)) else white_contrast) >= 4.5
