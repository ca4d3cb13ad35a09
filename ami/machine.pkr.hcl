# The builder, the machine on which an image is built. It has no open inbound port, no public address, no IMDSv1,
# encrypted disks, and a role for SSM that exists only during the build.
source "amazon-ebs" "machine" {
  region        = var.region
  source_ami    = var.base_image
  instance_type = var.instance_type
  subnet_id     = var.subnet

  communicator                          = "ssh"
  ssh_username                          = "ubuntu"
  ssh_interface                         = "session_manager"
  ssh_timeout                           = "20m"
  ssh_clear_authorized_keys             = true
  pause_before_ssm                      = "30s"
  associate_public_ip_address           = false
  temporary_security_group_source_cidrs = ["127.0.0.1/32"] # no one can connect: SSM's agent calls out
  temporary_key_pair_type               = "ed25519"

  temporary_iam_instance_profile_policy_document {
    Version = "2012-10-17"
    Statement {
      Effect = "Allow"
      Action = [
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
      Resource = ["*"]
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  imds_support = "v2.0"
  deprecate_at = var.deprecate_at

  encrypt_boot = true
  launch_block_device_mappings {
    device_name           = "/dev/sda1" # of all Ubuntu images
    volume_type           = "gp3"
    volume_size           = 150 # GiB, which EC2 rejects if the base image's volume is larger. Snapshots hold only data
    throughput            = 500
    iops                  = 4000
    encrypted             = true
    delete_on_termination = true
  }

  # The builder shuts down, and EC2 then removes it, even if Packer or the machine on which Packer runs is gone.
  user_data         = "#!/bin/sh\nshutdown -P +${var.max_minutes}\n"
  shutdown_behavior = "terminate"

  ami_name        = var.name
  ami_description = "baretrain"
  ami_regions     = var.copy_regions
  tags            = merge(var.tags, { "baretrain:base" = var.base_image })
  snapshot_tags   = var.tags
  run_tags        = { Name = "${var.name} (builder)" }
}
