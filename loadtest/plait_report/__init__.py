"""Pages and drawings of all reports: one HTML file each, whole in itself, so that it opens offline and from an e-mail.

`page` has the building blocks of a page and its style, `charts` draws. Both know numbers and text, not what they mean.
"""
