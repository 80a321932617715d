"""Flags of `ssl-bench reproduce`; imports nothing heavy, so that help answers at once."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked for, where things lie, and the one thing to be done."""
    add = parser.add_argument
    add("name", nargs="?", metavar="PAPER/TABLE", help="without one all tables are listed")
    add("--row", action="append", metavar="ROW", help="only this row; may be repeated")
    add("--dataset", metavar="NAME", help="only the columns on these datasets, with commas")
    add("--data-root", metavar="NAME=DIR", help="where images lie; several with commas")
    add("--runs", default="runs", metavar="DIR", help="where run folders are (default runs)")
    add("--out", default="results", metavar="DIR", help="records and pictures (default results)")
    add("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    way = parser.add_mutually_exclusive_group().add_argument
    way("--run", action="store_true", help="run it here; what is finished is skipped")
    way("--print", action="store_true", help="print its commands in order")
    way("--table", action="store_true", help="only print ours beside the published values")
