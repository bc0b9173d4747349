#!/usr/bin/env python3
# beaconkv: KV-cache eviction policies. SPDX-License-Identifier: MIT
"""The rows of two builds side by side, as in README.md and bench/README.md.

bench/table.py plain.json native.json [ROW...]    # what `bench_targets --json` wrote in each build; default: all rows
"""
import json
import sys


def shown(row):
    value = row["measured"]
    digits = 4 if value < 0.1 else 3 if value < 1 else 2 if value < 10 else 0 if value >= 100 else 1
    unit = row["unit"]
    text = f"{value:.{digits}f}{' ' if len(unit) > 1 else ''}{unit}"
    return text if row.get("passes", True) else f"**{text}**"


def target(row):
    for key, sign in (("at_most", "<="), ("at_least", ">=")):
        if key in row:
            return f"{sign} {row[key]:g}{row['unit']}"
    return ""


def main():
    builds = []
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for path in sys.argv[1:3]:
        with open(path, encoding="utf-8") as file:
            builds.append(json.load(file))
    wanted = sys.argv[3:]
    plain, native = ({row["name"]: row for row in build["rows"]} for build in builds)
    for build in builds:
        print(f"{build['cpu']}, {build['compiler']}, `{build['flags']}`, kernels: {build['instruction_set']}  ")
    print("\n| row | target | plain | native |\n|---|---|---|---|")
    if unknown := [name for name in wanted if name not in plain]:
        sys.exit(f"no such row: {', '.join(unknown)}")
    for name, row in plain.items():
        if wanted and name not in wanted:
            continue
        other = native.get(name)
        bound = target(row)
        if other is not None and target(other) != bound:
            bound += f"; {target(other)}"
        print(f"| {name} | {bound} | {shown(row)} | {shown(other) if other else ''} |")

    rate = f"scoring/rate/{builds[0]['instruction_set']}"
    if not wanted and rate in plain and rate in native:
        share = 100 * plain[rate]["measured"] / native[rate]["measured"]
        print(f"\nPlain build with dispatch / native, rate of scoring: {share:.0f} % (target: >= 85 %)")


main()
