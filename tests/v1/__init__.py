"The tests of version 0.1.0; a package, so that the new tests may have the same names."
