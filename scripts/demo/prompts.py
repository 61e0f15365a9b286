#!/usr/bin/env python3
"""Prompts of two narrow domains, made by this project, the same for the same seed.

A domain is narrow because its prompts come from a few forms, which is what live traffic of one
application looks like. Every prompt belongs to one split for good: the split is decided by its
place in the domain's fixed list, never by the seed, so a held-out prompt can not be trained on.

    python3 scripts/demo/prompts.py --domain arithmetic --split train --count 200 --seed 1
"""

import argparse
import json
import random
import sys

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry"]
OBJECTS = ["apples", "books", "cookies", "marbles", "pencils", "stamps", "stickers", "tickets"]
ARITHMETIC_FORMS = [
    "{name} has {a} {objects} and buys {b} more. How many {objects} does {name} have now?"
    " Explain step by step.",
    "{name} has {a} boxes with {b} {objects} in each box. How many {objects} does {name} have"
    " in total? Explain step by step.",
    "{name} had {large} {objects} and gave {b} of them to a friend. How many {objects} are left?"
    " Explain step by step.",
]

TABLES = {
    "customers": ["city", "age", "country", "email", "points", "status"],
    "orders": ["total", "quantity", "status", "region", "discount", "channel"],
    "products": ["price", "category", "stock", "brand", "weight", "rating"],
    "employees": ["salary", "department", "age", "title", "office", "bonus"],
    "students": ["grade", "score", "school", "age", "major", "credits"],
    "flights": ["price", "distance", "airline", "seats", "delay", "gate"],
}
SQL_FORMS = [
    "Write a SQL query that returns the top {n} rows of the table {table} ordered by {column}.",
    "Write a SQL query that counts the rows of the table {table} where {column} is greater than"
    " {n}.",
    "Write a SQL query that groups the table {table} by {column} and shows the groups with more"
    " than {n} rows.",
]

VARIANTS = 4
"""How many choices of numbers each combination of words and form gets."""

HELD_OUT_EVERY = 5
"""Of each five prompts in a domain's fixed list, one is held out."""


def arithmetic():
    numbers = random.Random("arithmetic numbers")
    for form in ARITHMETIC_FORMS:
        for name in NAMES:
            for objects in OBJECTS:
                for _ in range(VARIANTS):
                    a, b = numbers.randint(3, 20), numbers.randint(2, 12)
                    yield form.format(name=name, objects=objects, a=a, b=b, large=a + b)


def sql():
    numbers = random.Random("sql numbers")
    for form in SQL_FORMS:
        for table, columns in TABLES.items():
            for column in columns:
                for n in numbers.sample([3, 5, 8, 10, 12, 15, 20, 25, 50, 100], VARIANTS):
                    yield form.format(table=table, column=column, n=n)


DOMAINS = {"arithmetic": arithmetic, "sql": sql}
SPLITS = ["train", "held-out"]


def prompts(domain, split, count=None, seed=1):
    """Returns `count` distinct prompts (all of them for None) of one split, in the seed's order.

    Raises ValueError when the split has fewer than `count`.
    """
    if domain not in DOMAINS:
        raise ValueError(f"unknown domain {domain!r}, expected one of {sorted(DOMAINS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {SPLITS}")
    distinct = list(dict.fromkeys(DOMAINS[domain]()))
    random.Random(f"{domain} split").shuffle(distinct)
    held_out = split == "held-out"
    chosen = [p for i, p in enumerate(distinct) if (i % HELD_OUT_EVERY == 0) == held_out]
    random.Random(f"{domain} {split} {seed}").shuffle(chosen)
    if count is None:
        return chosen
    if count > len(chosen):
        raise ValueError(f"{domain}/{split} has {len(chosen)} prompts, {count} were asked for")
    return chosen[:count]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--domain", choices=sorted(DOMAINS), required=True)
    parser.add_argument("--split", choices=SPLITS, required=True)
    parser.add_argument("--count", type=int, help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        chosen = prompts(args.domain, args.split, args.count, args.seed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    for prompt in chosen:
        print(json.dumps({"domain": args.domain, "prompt": prompt}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
