"""From a published table to the runs and probes that stand for its rows, and ours beside it.

papers.py   which tables can be asked for, and how they are listed
plan.py     the commands of a table, in order, each of which can be given again
state.py    what lies in run folders and records already
costs.py    gigabytes of data
showing.py  the plan as text
carrying.py the plan carried out here; torch is imported from here on
beside.py   our records beside the published values

Nothing up to showing.py imports torch, so that looking costs a second.
"""
