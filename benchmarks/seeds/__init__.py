"""The five reports of an earlier project, in their settings: tables, claims and the page that shows both."""
