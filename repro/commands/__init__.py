"""One module per subcommand of ``python -m repro``; ``repro.__main__`` lists them."""
