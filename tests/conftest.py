"Every test runs with the package's shapes and types checked: a wrong axis fails by its name."
from jaxtyping import install_import_hook

install_import_hook('annotated_transformer', 'beartype.beartype')      # before anything imports the package
