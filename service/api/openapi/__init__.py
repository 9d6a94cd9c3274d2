"""The OpenAPI document, its examples and its pages."""
