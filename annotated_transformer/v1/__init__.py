"Version 0.1.0, until each of its modules is rebuilt one folder up."
