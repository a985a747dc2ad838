"""Documents as text: one reader per format, which runs in a child process with limits.

`kinds.document_kind` recognizes a document, `convert.convert_document` reads it.
"""
