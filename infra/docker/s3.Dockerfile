# SeaweedFS as a non-root user: a volume inherits the owner of its mount point.
FROM chrislusf/seaweedfs:4.48
USER 0
RUN mkdir /objects && chown 10001:10001 /objects
USER 10001:10001
ENTRYPOINT ["weed"]
CMD ["server", "-dir=/objects", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", \
     "-s3.ip.bind=0.0.0.0", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=0", \
     "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
