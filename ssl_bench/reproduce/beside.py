"""Our records beside a published table, each row by the encoder of its run."""

from ssl_bench.errors import CheckpointError
from ssl_bench.models import identify_encoder
from ssl_bench.reproduce.plan import Plan
from ssl_bench.reproduce.state import recorded
from ssl_bench.results.record import encoder_id
from ssl_bench.results.store import ResultStore
from ssl_bench.tables.paper import PaperTable, paper_table


def table_beside(plan: Plan) -> PaperTable:
    """The published table with what was recorded of the plan's encoders."""
    records = recorded(plan.asked.out)
    encoders = {row: _identity(address) for row, address in plan.checkpoints.items()}
    known = {record.encoder_id for record in records}
    return paper_table(
        plan.table,
        records,
        ResultStore(plan.asked.out),
        encoders={row: one for row, one in encoders.items() if one in known},
        choice="holdout",
    )


def _identity(address: str) -> str:
    """`Record.encoder_id` of a checkpoint; empty where there is none yet."""
    try:
        return encoder_id(identify_encoder(address).identity())
    except CheckpointError:
        return ""
