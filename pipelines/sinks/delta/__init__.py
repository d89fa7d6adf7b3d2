"""The Delta sink: one Delta table (target) per source table, and one published record next to them.

The way of a batch
==================
One batch, from its merge to the published record, for a target that keeps the latest state and that delta-rs writes.
An indented function is called by the one above it.

    DeltaSink.apply                        sink.py              lock the target, repeat a lost race of commits
      _apply_once                                               open, merge unless merged before, record
    plan
        OpenTargets.open_for               open_targets.py      remove columns of a longer range, from before a crash
          open                                                  find or create the target, check identity and layout
            DeltaTarget.refresh            target.py            read the commits of others
        check_columns                      open_targets.py      refuse a change that needs a full copy
        in_target_columns                                       columns and types of the batch in this target
        LatestState.merge                  latest_state.py      all steps from here to the commit, in their order
          _bases                                                the version of the target before the range
    evolve
          _evolve                                               columns, then defaults of new columns
            DeltaTarget.evolve_columns     target.py            one commit, or none
              plan                         schema_evolution.py  the change of the columns
            fill_defaults                  target.py
    fold to rows, base rows, overlay
          _source                          latest_state.py      the rows to merge
            table_source                   merge_source.py      complete images, then partial ones
              source_rows                                       deletes and complete images
              overlay                                           partial images over base rows
                find_base_rows
                  rows_with_keys                                one scan of the target
    write
          Writers.choose                   writers.py           delta-rs or Spark
          DeltaTarget.erase                target.py            rows that a truncate or a finished copy ended
          Writers.merge                    writers.py
            merge_with_delta_rs                                 one commit with the `txn` of the range
              MergeSpec                                         its conditions
    record, publish
        DeltaSink.record                   sink.py              position, version and state of the table
    DeltaSink.publish                                           called when all tables of the range are merged
      PublishedTable.write                 published.py         one row, one commit
        check                                                   no other driver published since

A target with history differs after in_target_columns: History.merge (history.py) evolves the columns, and HistoryMerge
(history_merge.py) completes every change, makes the rows of the history mode and writes them.

Interfaces with several implementations
=======================================
What a target keeps of a row: KeepingStrategy (strategy.py): LatestState; History, which has one HistoryRows for each of
versions, marked rows and every change (append).
Which rows of a target belong to a table: TargetPart (target_part.py): WholeTarget; SharedPart for merge_tables.
Who writes: Writers (writers.py): delta-rs; Spark; SparkTarget for table features that delta-rs cannot write.

Crashes
=======
Each commit of rows carries a `txn` with the position of its range, so a range is merged once. A crash between merge and
publish leaves a target ahead of the record. recovery.py compares both when a driver opens the sink; base rows are then
read from the published version.
"""
