"""One short file per paper; ``RECIPES`` names them."""

from __future__ import annotations

from diptych.names import import_plugins
from diptych.recipes import (
    clip,
    coder,
    cookie,
    cookie_hash,
    cookie_match,
    cookie_video,
    cusa_clip,
    cusa_fusion,
    cusa_sgraf,
    cusa_vse_infinity,
    cvse,
    fusion,
    labelwise,
    photos,
    ridge,
    scan,
    sgraf,
    vse_infinity,
    vse_infinity_published,
    vse_plus_plus,
    vse_video,
)
from diptych.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        ridge.RECIPE,
        photos.RECIPE,
        vse_infinity.RECIPE,
        vse_infinity_published.RECIPE,
        vse_plus_plus.RECIPE,
        coder.RECIPE,
        coder.LITERAL,
        scan.RECIPE,
        cvse.RECIPE,
        sgraf.SGR_RECIPE,
        sgraf.SAF_RECIPE,
        labelwise.RECIPE,
        vse_video.RECIPE,
        vse_video.MEAN,
        cookie.RECIPE,
        cookie_match.RECIPE,
        cookie_video.RECIPE,
        cookie_hash.RECIPE,
        clip.RECIPE,
        fusion.RECIPE,
        cusa_vse_infinity.RECIPE,
        cusa_clip.RECIPE,
        cusa_fusion.RECIPE,
        cusa_sgraf.SGR_RECIPE,
        cusa_sgraf.SAF_RECIPE,
    )
}
"""Recipes by name; a plugin adds its own: ``RECIPES["mine"] = Recipe(...)``."""


def find_recipe(name: str) -> Recipe | None:
    """A recipe by name; plugins are imported where the package itself has none of that name."""
    if name not in RECIPES:
        import_plugins()
    return RECIPES.get(name)
