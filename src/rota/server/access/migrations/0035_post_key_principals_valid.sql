ALTER TABLE rota.api_key VALIDATE CONSTRAINT api_key_has_principal;

ALTER TABLE rota.api_key VALIDATE CONSTRAINT api_key_principal;
