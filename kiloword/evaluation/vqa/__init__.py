"""The task `vqa`: visual question answering by the official metric."""
