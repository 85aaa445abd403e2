-- Creates a role and a database per server when the volume is new.
\getenv prefect PREFECT_DATABASE_PASSWORD
\getenv mlflow MLFLOW_DATABASE_PASSWORD
CREATE ROLE prefect LOGIN PASSWORD :'prefect';
CREATE DATABASE prefect OWNER prefect;
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE DATABASE mlflow OWNER mlflow;
