"""Keeping less: retention, removal, ageing, rollback."""
