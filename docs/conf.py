"""The site of the documentation: ``make docs``. Pages are the Markdown files of the repository, where they are."""

from adaptivespec_vllm import __version__

project = "AdaptiveSpec for vLLM"
author = "The AdaptiveSpec authors"
version = release = __version__

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "docs/*.md",
    "benchmarks/README.md",
    "examples/README.md",
    "adaptivespec_vllm/demo/assets/*/README.md",
    "tests/e2e/data/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
myst_heading_anchors = 4
smartquotes = False  # texts are typed as they are meant

html_theme = "furo"
html_title = f"AdaptiveSpec {version}"
html_extra_path = ["site"]  # a page at the root that leads to the first one
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
}
html_static_path = ["static"]
html_css_files = ["tables.css"]
