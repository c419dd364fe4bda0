"""`rota outputs`: lists, releases and redacts outputs that the output policy withholds."""
