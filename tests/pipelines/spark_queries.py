"""The queries that a Spark session has run since a moment, as its status store has them."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


class QueriesSince:
    """The queries since this object was made; the store keeps the latest thousand, and fills them in another thread."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._last = max((query.executionId() for query in self._kept()), default=-1)

    def ended(self) -> list[Any]:
        """Those that have ended."""
        own = [query for query in self._kept() if query.executionId() > self._last]
        return [query for query in own if query.completionTime().isDefined()]

    def _kept(self) -> list[Any]:
        self._spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        queries = self._spark._jsparkSession.sharedState().statusStore().executionsList()
        return [queries.apply(number) for number in range(queries.size())]
