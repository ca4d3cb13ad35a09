# Packer before 1.7, as in Debian, does not support required_plugins. This is a separate file so that tests can omit it.
packer {
  required_version = ">= 1.10.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "= 1.3.9" # packer-amazon in versions.yaml
    }
  }
}
