"`python -m annotated_transformer`: the command line, for `torchrun -m` and wherever the script is not on the path."
from .cli import main

if __name__ == '__main__':
    main()
