"""Read sources and write rankings in the formats of other programs; `docs/formats.md` has them field by field."""

from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion, RankingFormat, read_ranking, write_ranking
from mvr_ray.store.formats.records import BadRow, DroppedRow, PassageRecord, QuestionRecord, Record
from mvr_ray.store.formats.sources import format_of, read_question_file, read_source, source_files
from mvr_ray.store.formats.trec import RunLine, read_qrels, read_trec_run

__all__ = [
    "BadRow",
    "DroppedRow",
    "PassageRecord",
    "QuestionRecord",
    "RankedPassage",
    "RankedQuestion",
    "RankingFormat",
    "Record",
    "RunLine",
    "format_of",
    "read_qrels",
    "read_question_file",
    "read_ranking",
    "read_source",
    "read_trec_run",
    "source_files",
    "write_ranking",
]
