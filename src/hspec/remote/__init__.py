"""The layers of a target run elsewhere: a server that runs them, and clients that ask for residual streams."""
