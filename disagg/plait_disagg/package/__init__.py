"""A packaged model: the folder that plait serves a ranking model from.

::

    write_package(Path("picks"), module, inputs, name="picks")              # write
    package = open_package(Path("picks"))                                   # read
    ranker = CoreRanker(WholeCore(package.card(), package.sparse(), package.dense()))

Import from the submodules: `manifest` is read without torch, `read` without what traces models.
"""
