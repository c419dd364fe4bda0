ALTER TABLE rota.pool_spec ADD COLUMN placement text NOT NULL DEFAULT 'fit'
  CONSTRAINT pool_placement CHECK (placement IN ('fit', 'spread', 'pack'));

COMMENT ON COLUMN rota.pool_spec.placement IS 'Which of the workers with room gets a frame.';
