"""The ops folder watches, explains and tidies pools for operators: the command line and metrics."""
